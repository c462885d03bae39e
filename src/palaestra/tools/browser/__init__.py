"""A browser for rollouts: one Chromium per run (`shared_browser`), one context per rollout (`browser_session`).

The browser runs on this machine, outside of every slot; the slot's network settings do not apply to it.

Covered: pages reach the network through a proxy that checks every host and address, and cannot reach files of this
machine (only http, https, data and about:blank open); rollouts share no cookies, storage or cache; downloads are
refused; with root, Chromium runs as a separate user that owns nothing, in its own sandbox if the kernel allows it.

Not covered: without root, Chromium runs as the user who started the run, so an exploit of Chromium gains that account;
where Chromium's sandbox cannot start (a warning is logged), an exploit of a renderer is enough. All rollouts of a run
share one browser process; only the number of contexts limits its memory. If you open pages that you do not trust, run
Palaestra in its own virtual machine or container.
"""
