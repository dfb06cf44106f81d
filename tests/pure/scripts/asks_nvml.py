import json
import sys

import pynvml as nvml


def ask(function, *arguments):
    try:
        return getattr(nvml, "nvml" + function)(*arguments)
    except nvml.NVMLError as error:
        return type(error).__name__


def cores(handle):
    words = ask("DeviceGetCpuAffinity", handle, 2)
    return words if isinstance(words, str) else [i for i in range(128) if words[i // 64] >> i % 64 & 1]


def look(handle):
    if isinstance(handle, str):
        return handle
    names = ["UUID", "Name", "Index", "MinorNumber", "MigMode"]
    found = {name: ask("DeviceGet" + name, handle) for name in names}
    memory, rates = ask("DeviceGetMemoryInfo", handle), ask("DeviceGetUtilizationRates", handle)
    found["memory"] = memory if isinstance(memory, str) else [memory.total, memory.used, memory.free]
    found["utilization"] = rates if isinstance(rates, str) else rates.gpu
    found["cores"] = cores(handle)
    found["pci"] = ask("DeviceGetPciInfo", handle).busId
    found["is_mig"] = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
    for version in ("_v2", "_v3"):
        processes = ask("DeviceGetComputeRunningProcesses" + version, handle)
        found["processes" + version] = [[p.pid, p.usedGpuMemory] for p in processes]
    others = ask("DeviceGetHandleByUUID", found["UUID"]), ask("DeviceGetHandleByPciBusId", found["pci"])
    found["same"] = [ask("DeviceGetUUID", other) for other in others]
    found["mig"] = [
        look(ask("DeviceGetMigDeviceHandleByIndex", handle, i))
        for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    ]
    return found


start = ask("Init")
if start is not None:
    print(json.dumps(start))
    sys.exit()
count = nvml.nvmlDeviceGetCount()
print(json.dumps([look(ask("DeviceGetHandleByIndex", i)) for i in range(count)]))
