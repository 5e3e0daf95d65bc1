"""What a checkpoint directory is, and the one way it changes. Standard library only."""
