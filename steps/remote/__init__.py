"""A run in a bucket: what is there, what is missing, how it gets there and back. Any S3 server with `If-None-Match`.

The bucket mirrors the run's folder, s3://bucket/prefix/<run>/<path>/<file>. A folder's manifest goes last, and only
where there is none yet: a half upload is invisible, and two machines can't overwrite each other.
"""
