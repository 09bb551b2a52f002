"""Conversations: messages, and the chat templates that write them as text."""
