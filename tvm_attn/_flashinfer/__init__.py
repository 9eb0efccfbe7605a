"""What the facades share: FlashInfer's arguments in our terms, and its larger wrapper classes."""
