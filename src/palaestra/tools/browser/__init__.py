"""A browser for rollouts: one Chromium per run (`shared_browser`), one context per rollout (`browser_session`).

The browser runs on this machine, outside of every slot; the slot's network settings do not apply to it.

Covered: pages reach the network through a proxy that checks every host and address, never files of this machine (only
http, https, data and about:blank are opened); rollouts share no cookies, storage or cache; downloads are refused; with
root, Chromium runs as a user of its own that owns nothing, in its own sandbox if the kernel allows it.

Not covered: without root, Chromium runs as the user who started the run, and a hole in it is a hole into that account;
where Chromium's sandbox cannot start (a warning is logged), a hole in a renderer is enough. All rollouts of a run share
one browser process, whose memory nothing limits but the number of contexts. For pages of people you do not trust, run
Palaestra in a virtual machine or container of its own.
"""
