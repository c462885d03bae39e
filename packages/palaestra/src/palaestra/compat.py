"""Import this module first in a script that cannot be changed, and the script can import names by their old module
paths; `palaestra run SCRIPT.py --compat` does the same. `contract/old_modules.py` says which modules these are.

    import palaestra.compat
    from environments.hermes_base_env import HermesAgentBaseEnv      # palaestra's
"""

from palaestra_contract.old_modules import install

install()
