"""What a hook costs."""
