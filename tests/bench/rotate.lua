-- Send the requests of a file in rotation (each after its length), and print the result as JSON.
local requests, count, turn = {}, 0, 0

function init(arguments)
    local file = assert(io.open(arguments[1], "rb"))
    local length = file:read("*n")
    while length do
        file:read(1)
        count = count + 1
        requests[count] = file:read(length)
        length = file:read("*n")
    end
    file:close()
end

function request()
    turn = turn % count + 1
    return requests[turn]
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format(
        '{"requests": %d, "seconds": %f, "p50_us": %f, "p99_us": %f, "errors": %d}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
        errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
