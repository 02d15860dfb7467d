"""Reports to the operator: `report` is the document, `changes` what of it is news,
`reporter` sends it when it is due."""
