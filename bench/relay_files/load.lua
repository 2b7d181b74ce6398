-- wrk's script: POSTs one body under 64 session ids in turn. Arguments: path, body file.
local requests, at = {}, 0

function init(args)
  local file = assert(io.open(args[2], "rb"))
  local body = file:read("*a")
  file:close()
  for session = 1, 64 do
    requests[session] = wrk.format("POST", args[1], {
      ["Content-Type"] = "application/json",
      ["X-Session-ID"] = string.format("rollout-%04d", session),
    }, body)
  end
end

function request()
  at = at % 64 + 1
  return requests[at]
end
