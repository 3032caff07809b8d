"""Drop-in for ElasticJobs of `elastic.pytorch.org`, the API of torchelastic's archived controller.

Only the registry of drop-ins imports this package. https://github.com/pytorch/elastic/tree/master/kubernetes
"""
