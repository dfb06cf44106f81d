-- The rules of three centres, from their pages, by the name of the partition.
local function refuse(why)
  slurm.log_user(why)
  return slurm.ERROR
end

local function memory(job)
  return job.pn_min_memory ~= nil and job.pn_min_memory ~= slurm.NO_VAL64
end

local function is_set(number)
  return number ~= nil and number ~= slurm.NO_VAL and number ~= slurm.NO_VAL16 and number ~= 0
end

function slurm_job_submit(job, partitions, uid)
  local gpus = job.tres_per_node or job.tres_per_job or job.tres_per_task
  if job.partition == "gh" and (gpus or memory(job)) then -- TACC: no --mem, no GPUs
    return refuse("gh: --mem, --gres and --gpus-per-task are not available")
  end
  if job.partition == "zen4_h200" then -- VUB: 24 cores for each GPU, no --mem
    local number = tonumber(string.match(gpus or "", "(%d+)$") or "1")
    if memory(job) then
      return refuse("zen4_h200: --mem is not allowed")
    end
    if job.cpus_per_task ~= 24 * number then
      return refuse("zen4_h200: 24 cores for each GPU")
    end
  end
  if job.partition == "gpu" and (job.qos == "gpu-exc") and (is_set(job.ntasks_per_node) or memory(job)) then -- ARCHER2
    return refuse("gpu: tasks and memory follow from the GPUs")
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
