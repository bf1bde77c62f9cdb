"""What engines say and what means nothing here, silenced one by one, by name. Import this before them."""

import logging
import warnings

# bitsandbytes could download a faster kernel, and takes its own without it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# On CPUs its paged optimizers are not paged.
warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
# peft asks for a name that Transformers 5 has given up.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
# Accelerate imports DeepSpeed where it is installed, which then says that there is no GPU. A filter, since DeepSpeed
# sets the level of its logger itself.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
