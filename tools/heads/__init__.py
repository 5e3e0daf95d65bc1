"""Value heads: which there are, where a checkpoint has one, and what it is called as a part of another class."""
