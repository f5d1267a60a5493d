"""The arithmetic that all backends share."""
