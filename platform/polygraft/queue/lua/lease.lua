-- task, gateway, ttl (ms) -> 1 if the task is now the gateway's for so long, 0 if it is another's
local holder = redis.call('GET', LEASE .. ARGV[1])
if holder and holder ~= ARGV[2] then
  return 0
end
redis.call('SET', LEASE .. ARGV[1], ARGV[2], 'PX', ARGV[3])
return 1
