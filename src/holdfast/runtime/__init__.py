"""Interrupts, scopes, threads, process trees and queues. Needs nothing outside the standard library."""
