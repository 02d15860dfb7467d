"""Pods that serve what a run left on a node, and clean it when the run is gone."""
