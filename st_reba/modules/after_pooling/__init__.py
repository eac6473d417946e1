"""What stands after the pooling, fitted on plain texts."""
