"""Pods that serve what a run left on a node, or clean the node up once the run is gone."""
