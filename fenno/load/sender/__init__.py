"""The traffic's own process, under locust: the only code of fenno that imports locust and gevent, with `load/locustfile.py`."""
