"""Merging an adapter into its base, and taking one out of a trained model: plans, and the arithmetic of a tensor."""
