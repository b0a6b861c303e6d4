"""What callers get wrong, found early and said in a sentence."""
