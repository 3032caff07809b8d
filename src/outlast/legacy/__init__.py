"""The drop-in for ElasticJobs of `elastic.pytorch.org`. Nothing else depends on it but the registrations."""
