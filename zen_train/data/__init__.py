"""Text in, packed batches out: records, masking, packing, the DataModule, the 14 corpora."""
