"""Text: tokens and templates of chats. Knows nothing of tensors."""
