-- worker, max_wait (ms), record_ttl (ms), then for each job: id, attempt
-- Gives claimed jobs back that were not begun; it does not count as a loss.
local worker, max_wait, record_ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

for i = 4, #ARGV, 2 do
  local id, attempt = ARGV[i], ARGV[i + 1]
  local job = redis.call('HMGET', JOB .. id, 'worker', 'attempt', 'state', 'cancelled')
  if job[1] == worker and job[2] == attempt and job[3] == 'running' and redis.call('LLEN', EVENTS .. id) == 0 then
    if job[4] then
      conclude(id, aborted(id), record_ttl)
    else
      requeue(id, max_wait)
    end
  end
end
return 1
