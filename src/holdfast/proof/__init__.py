"""The proof that Holdfast keeps its promises: storms, faults, a checker of histories, a comparison of frameworks."""
