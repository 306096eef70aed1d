-- worker, model, card (JSON), created (s), status, worker_ttl (ms), card_ttl (ms) -> 1, or 0 if another live worker serves
-- a different model under this name
local worker, model, card, created, status = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local worker_ttl, card_ttl = tonumber(ARGV[6]), tonumber(ARGV[7])

local registered = redis.call('HGET', CARD .. model, 'card')
if registered and registered ~= card then
  for _, other in ipairs(redis.call('SMEMBERS', WORKERS)) do
    local theirs = other ~= worker and redis.call('GET', WORKER .. other)
    if theirs and cmsgpack.unpack(theirs).model == model then
      return 0
    end
  end
end
redis.call('HSET', CARD .. model, 'card', card)
redis.call('HSETNX', CARD .. model, 'created', created)
redis.call('PEXPIRE', CARD .. model, card_ttl)
redis.call('SADD', CARDS, model)
redis.call('SADD', WORKERS, worker)
redis.call('SET', WORKER .. worker, status, 'PX', worker_ttl)
return 1
