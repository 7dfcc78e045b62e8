"""Settings of a model on several devices or machines; `antiphon.shared.distributed.world` checks them."""

from antiphon.shared.flags import AT_LEAST_1, NOT_NEGATIVE, PORT, Settings, flag


class ParallelSettings(Settings, group="engine: parallel"):
    """Settings of an engine."""

    tensor_parallel_size: int = flag(
        1,
        "devices that share each layer of the model; it must divide the number of attention heads",
        env="TP",
        rule=AT_LEAST_1,
        alias=("-tp", "--num-gpus"),
    )
    pipeline_parallel_size: int = flag(
        1, "groups of devices, each of which has a part of the layers", rule=AT_LEAST_1, alias=("-pp",)
    )
    distributed_executor_backend: str = flag(
        "auto",
        "what starts the processes of several devices: mp (the engine itself) or ray; auto: ray if RAY_ADDRESS is set "
        "and ray is installed, else mp",
        choices=("auto", "ray", "mp"),
    )
    nnode: int = flag(
        1, "machines that compute the model together; the same command runs on each of them", rule=AT_LEAST_1
    )
    pod_ips: str = flag("", "addresses of these machines, separated by commas; the first machine runs the server")
    node_rank: int | None = flag(
        None,
        "place of this machine in --pod-ips, from 0 (default: by its addresses)",
        env="NODE_RANK",
        rule=NOT_NEGATIVE,
    )
    master_port: int = flag(
        29500,
        "port at the first machine where the processes of the other ones join; a second engine uses the next port",
        rule=PORT,
    )
    cluster_key_file: str = flag(
        "",
        "file with a secret that is the same on each of several machines, or for each instance of rank tables; needed "
        "with several machines (default: one of this user)",
        env="ANTIPHON_CLUSTER_KEY_FILE",
    )
    disable_custom_all_reduce: bool = flag(False, "has no effect: sums between devices are those of torch.distributed")
