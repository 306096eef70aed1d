-- worker, model, step_ended (s), lease (ms), record_ttl (ms),
-- then for each job: id, attempt, seq, final ('1' or ''), event; an empty event only renews the lease
-- -> {this worker's jobs to cancel, jobs of this call that are not its own, 1 if the model has queued jobs}
-- Fenced by worker and attempt; an event that is already in the record is not announced twice.
local worker, model, step_ended = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lease, record_ttl = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local stale, news = {}, {}

for i = 6, #ARGV, 5 do
  local id, attempt, seq, final, event = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local job = redis.call('HMGET', JOB .. id, 'worker', 'attempt', 'state', 'gateway', 'deadline')
  local gateway, deadline = job[4], tonumber(job[5])
  if job[1] ~= worker or job[2] ~= attempt or job[3] ~= 'running' then
    stale[#stale + 1] = id
  else
    local recorded = event == '' and seq or redis.call('LLEN', EVENTS .. id)
    if recorded < seq then
      -- The server came back with less than it had: what is missing cannot be told any more.
      local ending = failed('dependency_unavailable', 'A part of the answer was lost; try again.')
      ending.seq = seq
      conclude(id, ending, record_ttl)
      stale[#stale + 1] = id
    else
      if event ~= '' and recorded == seq then
        redis.call('RPUSH', EVENTS .. id, event)
        news[gateway] = news[gateway] or {}
        table.insert(news[gateway], event)
      end
      if final == '1' then
        retire(id, gateway, worker, record_ttl)
      else
        redis.call('ZADD', RUNNING, now + lease, id)
        if deadline > 0 and deadline < now then
          redis.call('SADD', CANCELS .. worker, id)
        end
      end
    end
  end
end

for gateway, events in pairs(news) do
  announce(gateway, step_ended, events)
end
return { redis.call('SMEMBERS', CANCELS .. worker), stale, redis.call('EXISTS', RING .. model) }
