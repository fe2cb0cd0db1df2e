"""Text in, packed batches out: records, masking, packing, the DataModule and the corpora of the 14 variants."""
