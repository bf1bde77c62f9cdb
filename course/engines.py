"""The engines: libraries that implement a strategy of the course in their own way (requirements-engines.txt).

Each function imports its script when it is asked for, since the library may not be installed.
"""

from common.strategy import Engine, Strategy


def ddp_with_accelerate() -> type[Strategy]:
    from course.ddp.with_accelerate import DDPWithAccelerate

    return DDPWithAccelerate


def ddp_with_fabric() -> type[Strategy]:
    from course.ddp.with_fabric import DDPWithFabric

    return DDPWithFabric


def zero1_with_deepspeed() -> type[Strategy]:
    from course.fsdp.with_deepspeed import Zero1WithDeepSpeed

    return Zero1WithDeepSpeed


def zero2_with_deepspeed() -> type[Strategy]:
    from course.fsdp.with_deepspeed import Zero2WithDeepSpeed

    return Zero2WithDeepSpeed


def fsdp_with_deepspeed() -> type[Strategy]:
    from course.fsdp.with_deepspeed import Zero3WithDeepSpeed

    return Zero3WithDeepSpeed


def fsdp_with_accelerate() -> type[Strategy]:
    from course.fsdp.with_accelerate import FSDPWithAccelerate

    return FSDPWithAccelerate


def fsdp_with_trainer() -> type[Strategy]:
    from course.fsdp.with_trainer import FSDPWithTrainer

    return FSDPWithTrainer


# By strategy: the engines that implement it.
OF = {
    "ddp": {"accelerate": Engine("accelerate", ddp_with_accelerate), "fabric": Engine("lightning", ddp_with_fabric)},
    "zero1": {"deepspeed": Engine("deepspeed", zero1_with_deepspeed)},
    "zero2": {"deepspeed": Engine("deepspeed", zero2_with_deepspeed)},
    "fsdp": {
        "accelerate": Engine("accelerate", fsdp_with_accelerate),
        "deepspeed": Engine("deepspeed", fsdp_with_deepspeed),
        "trainer": Engine("transformers", fsdp_with_trainer),
    },
}
