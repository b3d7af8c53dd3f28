local state, id, ttl, reserve = KEYS[1], struct.unpack('>c24I8I4', ARGV[1])
