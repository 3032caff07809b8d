"""ElasticJobs of `elastic.pytorch.org`, of torchelastic's archived controller. Nobody but the registry of drop-ins knows it.

https://github.com/pytorch/elastic/tree/master/kubernetes
"""
