"""Reports to the operator: `report` makes the document, and reduces it to what is new; `reporter`
sends it when it is due."""
