"""Pure decisions: when and how far to speculate."""
