"""Reports to the operator: `report` is the document, `reporter` sends it when it is due."""
