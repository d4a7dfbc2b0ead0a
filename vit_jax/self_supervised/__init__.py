"""Learning without labels, and from a teacher."""
