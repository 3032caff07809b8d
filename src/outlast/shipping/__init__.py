"""Code of this machine on its way to pods: packed, and put where they find it.

    with shipping.parcel(job, but=[job_file]) as parcel:
        parcel.put()                                                     only what goes to a store
        documents = manifests.render(parcel.job, topology, code=parcel.code)

Called by the commands that render documents from a job file. A job whose code is in a store, in the image or on a volume passes
through unchanged. The same tree is packed to the same bytes, named by their SHA-256, so what has been shipped once is not shipped
again.
"""

from __future__ import annotations

from outlast.shipping.parcel import Parcel, parcel

__all__ = ["Parcel", "parcel"]
