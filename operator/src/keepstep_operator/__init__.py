"""The Kubernetes operator: empty until its own work begins (see CHANGELOG, "Not yet")."""
