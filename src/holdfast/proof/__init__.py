"""Tests of Holdfast's promises: storms, fault injection, a history checker, and a comparison of frameworks."""
