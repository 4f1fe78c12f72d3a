"""Extensions of Calipers, found by their entry points."""
