"""Conversations for fine-tuning: from JSON lines to tokens with loss masks, packed into rows."""
