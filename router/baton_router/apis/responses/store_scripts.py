"""Scripts by which Redis bounds the stored responses of all tenants.

Redis knows of each tenant its responses with their expiry, in an index, and of all tenants about
how many bytes each has: what has expired counts until a script looks.
"""

# Stores a response. Drops the expired ones from the index, and the oldest ones above the limit.
# A Redis whose memory is half full stores none beside those that it has, since registration needs
# the other half: the oldest ones of the tenant with the most are dropped for it. That is the
# tenant itself, unless the other one has more than it then would (`FairBound.victim_for`).
#   KEYS: index, response, bytes of all tenants; ARGV: number, content, TTL in milliseconds, now in
#   milliseconds, maximum number of responses, tenant
PUT = """
local now, tenant, size = tonumber(ARGV[4]), ARGV[6], #ARGV[2]
local prefix = string.sub(KEYS[1], 1, #KEYS[1] - #tenant)

if redis.call('TYPE', KEYS[3])['ok'] ~= 'zset' then redis.call('DEL', KEYS[3]) end

-- Returns the responses of a tenant, the oldest first, and their bytes.
local function responses_of(other)
  local index, kept, held = prefix .. other, {}, 0
  local found = redis.pcall('HGETALL', index)  -- an error if it is of another type, without items
  for i = 1, #found, 2 do
    local expiry = tonumber(found[i + 1]) or 0
    if expiry <= now then redis.call('HDEL', index, found[i])
    else
      local bytes = tonumber(redis.pcall('STRLEN', index .. ':' .. found[i])) or 0
      kept[#kept + 1] = {expiry, found[i], bytes}
      held = held + bytes
    end
  end
  table.sort(kept, function(a, b) return a[1] < b[1] end)
  return kept, held
end

local function count(other, held)
  if held > 0 then redis.call('ZADD', KEYS[3], held, other)
  else redis.call('ZREM', KEYS[3], other) end
end

local function drop(other, response)
  redis.call('HDEL', prefix .. other, response[2])
  redis.call('DEL', prefix .. other .. ':' .. response[2])
  return response[3]
end

local kept, held = responses_of(tenant)
for i = 1, #kept - tonumber(ARGV[5]) + 1 do
  held = held - drop(tenant, table.remove(kept, 1))
end
count(tenant, held)

local memory = redis.call('INFO', 'memory')
local used = tonumber(string.match(memory, 'used_memory:(%d+)')) or 0
local most = tonumber(string.match(memory, 'maxmemory:(%d+)')) or 0
local excess = used + size - most / 2
if most > 0 and excess > 0 then
  local victim, victims, has = tenant, kept, held
  for _ = 1, 8 do  -- until the one that seems to have the most has it
    local largest, score = unpack(redis.call('ZREVRANGE', KEYS[3], 0, 0, 'WITHSCORES'))
    if not largest or largest == tenant then break end
    local others, bytes = responses_of(largest)
    count(largest, bytes)
    if bytes >= tonumber(score) then
      if bytes > held + size then victim, victims, has = largest, others, bytes end
      break
    end
  end
  if has < excess then return 0 end
  while excess > 0 do
    local bytes = drop(victim, table.remove(victims, 1))
    excess, has = excess - bytes, has - bytes
  end
  count(victim, has)
  if victim == tenant then held = has end
end
redis.call('HSET', KEYS[1], ARGV[1], now + ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
count(tenant, held + size)
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return 1
"""

# Deletes a response.
#   KEYS: as of `PUT`; ARGV: number, tenant
DELETE = """
local bytes = tonumber(redis.pcall('STRLEN', KEYS[2])) or 0
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[1], ARGV[1])
if tonumber(redis.call('ZINCRBY', KEYS[3], -bytes, ARGV[2])) <= 0 then
  redis.call('ZREM', KEYS[3], ARGV[2])
end
return 1
"""
