"""What a run of the tests says about the machine that it ran on: a number that rounds otherwise there has a place to begin."""


def pytest_report_header() -> str:
    import torch

    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return (
        f"numerics: CPU capability {capability} (ATEN_CPU_CAPABILITY), {threads} thread(s) a process (OMP_NUM_THREADS)"
    )
