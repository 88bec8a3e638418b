"""The notifier: messages to operators, queued by SQL, sent with one verdict per attempt."""
