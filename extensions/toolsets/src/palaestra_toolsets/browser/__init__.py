"""A browser for rollouts: one Chromium per run (`shared_browser`), one context per rollout (`browser_session`).

The browser runs on this machine, outside of every slot. A slot's network settings do not apply to it.

Covered: pages reach the network only through a proxy that checks every host and address. They cannot reach files of
this machine, because only http, https and data addresses and about:blank open. Rollouts share no cookies, storage or
cache, and downloads are refused. If this process runs as root, Chromium runs as a separate user that owns only the
browser's files, and in Chromium's own sandbox. `launch` lists what it tries if that does not work.

Not covered: without root, Chromium runs as the user who started the run, so an exploit of Chromium gains that account.
If Chromium's sandbox cannot start, an exploit of one renderer process is enough to gain it; a warning is logged. All
rollouts of a run share one browser process; only the number of contexts limits its memory. If you open pages that you
do not trust, run Palaestra in its own virtual machine or container.
"""
