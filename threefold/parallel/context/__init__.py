"""Context parallelism: attention over a sequence whose positions are spread over ranks."""
