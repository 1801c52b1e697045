/*
 * Load generator in open loop for servers that are faster than pacer.py: the same schedule and results, in C.
 *
 *     pacer PORT REQUESTS SECONDS CONNECTIONS RATE
 *
 * The n-th request is due at a time fixed in advance, on connection n modulo their number. Its latency is measured from
 * that time even if it is sent later, so that a stall counts for every request that waited (no coordinated omission).
 * Prints one line of JSON. A closed connection, or a response that cannot be parsed, ends the run with exit 1.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 -1 /* headers older than Linux 5.11: as on a kernel that is */
#endif

#define MILLISECOND_NS INT64_C(1000000)
#define SECOND_NS INT64_C(1000000000)
#define GIVE_UP_NS (5 * SECOND_NS)   /* after the last request was due */
#define NAP_NS 30000                 /* minimum sleep: waking up for each request would leave the database no time,
                                      * and Linux would then suspend this real-time task for 50 ms of each second */
#define READ_BYTES 262144
#define LINE_BYTES 8192
#define MOST_LENGTH (UINT64_C(1) << 48) /* of a response, so that no sum overflows */
#define LOST "the server closed a connection that was to be kept"

struct bytes {
    const char *start;
    size_t length;
};

struct times {
    int64_t *values;
    int64_t count;
};

/* Parser of one response. It keeps only the beginning of an incomplete line. */
struct answer {
    enum { STATUS, HEADERS, BODY, CHUNK_SIZE, CHUNK, TRAILERS } stage;
    unsigned status;
    bool is_chunked;
    uint64_t left; /* of the body, or of the chunk */
    size_t held;
    char line[LINE_BYTES];
};

struct connection {
    int socket;
    bool is_answered;
    int64_t following; /* the row of the request that it sends next */
    int64_t due;
    struct bytes unsent;
    struct answer answer;
};

struct run {
    struct bytes *requests;
    size_t requests_count;
    struct connection *connections;
    struct epoll_event *events;
    int64_t connections_count;
    int poll;
    double gap;
    int64_t began, offered;
    int64_t row; /* of the schedule: the first that was not due yet */
    int64_t sent, errors;
    struct times latencies, lateness;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

static void skip(struct bytes *bytes, size_t count)
{
    bytes->start += count;
    bytes->length -= count;
}

/* --- answers --- */

/* Take a line without its end from the bytes read; false if it is incomplete. A response that arrives in one read, as
 * nearly all do, is not copied. */
static bool take_line(struct answer *answer, struct bytes *read, struct bytes *line)
{
    const char *end = memchr(read->start, '\n', read->length);
    size_t taken = end ? (size_t)(end - read->start) + 1 : read->length;
    *line = (struct bytes){read->start, taken};
    if (!end || answer->held) {
        if (taken > LINE_BYTES - answer->held)
            errx(1, "a line of an answer is too long");
        memcpy(answer->line + answer->held, read->start, taken);
        answer->held += taken;
        *line = (struct bytes){answer->line, answer->held};
    }
    skip(read, taken);
    if (!end)
        return false;
    answer->held = 0;
    while (line->length && isspace((unsigned char)line->start[line->length - 1]))
        line->length--;
    return true;
}

/* Parse the number at the beginning of a text; only a chunk extension may follow it. */
static uint64_t read_number(struct bytes text, unsigned base)
{
    uint64_t number = 0;
    bool is_number = false;
    while (text.length && isblank((unsigned char)*text.start))
        skip(&text, 1);
    for (; text.length && isxdigit((unsigned char)*text.start); skip(&text, 1)) {
        int letter = tolower((unsigned char)*text.start);
        unsigned digit = (unsigned)(isdigit(letter) ? letter - '0' : letter - 'a' + 10);
        number = number * base + digit;
        is_number = digit < base && number < MOST_LENGTH;
        if (!is_number)
            break;
    }
    if (!is_number || (text.length && !isblank((unsigned char)*text.start) && *text.start != ';'))
        errx(1, "a number in the head of an answer is not understood");
    return number;
}

static void read_status(struct answer *answer, struct bytes line)
{
    if (line.length < 12 || memcmp(line.start, "HTTP/1.", 7) != 0)
        errx(1, "what the server answers is not HTTP/1");
    answer->status = (unsigned)read_number((struct bytes){line.start + 9, 3}, 10);
    answer->is_chunked = false;
    answer->left = 0;
}

/* Return whether the header has this name, and ends with this value unless it is empty. */
static bool is_header(struct bytes line, struct bytes name, struct bytes value)
{
    return line.length >= name.length + value.length && strncasecmp(line.start, name.start, name.length) == 0 &&
           strncasecmp(line.start + line.length - value.length, value.start, value.length) == 0;
}

static void read_header(struct answer *answer, struct bytes line)
{
    static const struct bytes length = {"content-length:", 15}, coding = {"transfer-encoding:", 18};
    if (is_header(line, length, (struct bytes){"", 0})) {
        skip(&line, length.length);
        answer->left = read_number(line, 10);
    } else if (is_header(line, coding, (struct bytes){"chunked", 7})) {
        answer->is_chunked = true;
    }
}

/* Begin the part after the head. Without a length there is no body, because the connection is persistent. */
static void begin_body(struct answer *answer)
{
    bool is_interim = answer->status < 200, is_bare = answer->status == 204 || answer->status == 304;
    if (is_bare)
        answer->left = 0;
    answer->stage = is_interim ? STATUS : answer->is_chunked && !is_bare ? CHUNK_SIZE : BODY;
}

/* Parse the bytes read; return whether the response is complete. Then the parser is ready for the next one. */
static bool read_answer(struct answer *answer, struct bytes *read)
{
    struct bytes line;
    for (;;) {
        if (answer->stage == BODY || answer->stage == CHUNK) {
            size_t taken = answer->left < read->length ? (size_t)answer->left : read->length;
            skip(read, taken);
            answer->left -= taken;
            if (answer->left)
                return false;
            if (answer->stage == BODY)
                break;
            answer->stage = CHUNK_SIZE;
        }
        if (!take_line(answer, read, &line))
            return false;
        if (answer->stage == STATUS) {
            read_status(answer, line);
            answer->stage = HEADERS;
        } else if (answer->stage == CHUNK_SIZE) {
            uint64_t size = read_number(line, 16);
            answer->left = size + 2; /* with the end of its last line */
            answer->stage = size ? CHUNK : TRAILERS;
        } else if (answer->stage == HEADERS && line.length) {
            read_header(answer, line);
        } else if (answer->stage == HEADERS) {
            begin_body(answer);
        } else if (!line.length) { /* after the trailers */
            break;
        }
    }
    answer->stage = STATUS;
    return true;
}

/* --- connections --- */

static bool is_free(const struct connection *connection)
{
    return connection->is_answered && !connection->unsent.length;
}

/* Edge-triggered: after an event, read until the response is complete or no bytes are left. */
static void open_connection(struct run *run, struct connection *connection, uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = connection};
    int at_once = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connection->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    connection->is_answered = true;
    if (connection->socket < 0 || connect(connection->socket, (struct sockaddr *)&address, sizeof address) < 0 ||
        setsockopt(connection->socket, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once) < 0 ||
        fcntl(connection->socket, F_SETFL, O_NONBLOCK) < 0 ||
        epoll_ctl(run->poll, EPOLL_CTL_ADD, connection->socket, &event) < 0)
        err(1, "no connection to the server");
}

/* Send as many bytes as the socket accepts; the others are sent when it is writable. */
static void push(struct connection *connection)
{
    struct bytes *unsent = &connection->unsent;
    while (unsent->length) {
        ssize_t sent = send(connection->socket, unsent->start, unsent->length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN)
            return;
        if (sent < 0)
            err(1, LOST);
        skip(unsent, (size_t)sent);
    }
}

static void receive(struct run *run, struct connection *connection)
{
    static char buffer[READ_BYTES];
    ssize_t length;
    while ((length = recv(connection->socket, buffer, sizeof buffer, 0)) > 0) {
        int64_t now = now_ns();
        struct bytes read = {buffer, (size_t)length};
        bool is_asked_for = !connection->is_answered;
        if (is_asked_for && !read_answer(&connection->answer, &read))
            continue;
        if (!is_asked_for || read.length)
            errx(1, "the server sent more than it was asked for");
        if (connection->answer.status / 100 == 2)
            run->latencies.values[run->latencies.count++] = now - connection->due;
        else
            run->errors++;
        connection->is_answered = true;
        return;
    }
    if (length == 0)
        errx(1, LOST);
    if (errno != EAGAIN)
        err(1, LOST);
}

/* --- the schedule --- */

static int64_t due_of(const struct run *run, int64_t row)
{
    return run->began + (int64_t)((double)row * run->gap);
}

static void send_following(struct run *run, struct connection *connection)
{
    connection->due = due_of(run, connection->following);
    connection->following += run->connections_count;
    connection->unsent = run->requests[(size_t)run->sent++ % run->requests_count];
    connection->is_answered = false;
    push(connection);
}

/* Send all due requests on free connections, and return the time. On a busy connection `serve` sends the request later,
 * with the same due time. */
static int64_t send_due(struct run *run)
{
    int64_t now = now_ns(), due;
    for (; run->row < run->offered && (due = due_of(run, run->row)) <= now; run->row++) {
        struct connection *connection = &run->connections[run->row % run->connections_count];
        run->lateness.values[run->lateness.count++] = now - due;
        if (is_free(connection)) {
            send_following(run, connection);
            now = now_ns();
        }
    }
    return now;
}

static void serve(struct run *run, const struct epoll_event *event)
{
    struct connection *connection = event->data.ptr;
    push(connection);
    if (event->events & ~(uint32_t)EPOLLOUT) /* reading reports errors, too */
        receive(run, connection);
    if (is_free(connection) && connection->following < run->row)
        send_following(run, connection);
}

/* Wait for events; return their number. A kernel before 5.11 has no timeout in nanoseconds: there the remainder of a
 * millisecond is spent polling. */
static int await(struct run *run, int64_t wait)
{
    if (wait < 0)
        wait = 0;
    if (run->gap < NAP_NS) {
        const struct timespec nap = {0, NAP_NS};
        nanosleep(&nap, NULL);
        wait = 0;
    }
    struct {
        int64_t seconds, nanoseconds;
    } most = {wait / SECOND_NS, wait % SECOND_NS};
    int count = (int)run->connections_count;
    int ready = (int)syscall(SYS_epoll_pwait2, run->poll, run->events, count, &most, NULL, (size_t)0);
    if (ready < 0 && errno != EINTR)
        ready = epoll_wait(run->poll, run->events, count, (int)(wait / MILLISECOND_NS));
    if (ready < 0 && errno != EINTR)
        err(1, "epoll_wait");
    return ready;
}

static void follow_schedule(struct run *run)
{
    run->began = now_ns();
    int64_t last = due_of(run, run->offered) + GIVE_UP_NS;
    while (run->latencies.count + run->errors < run->offered) {
        int64_t now = send_due(run);
        if (now > last)
            return;
        int ready = await(run, (run->row < run->offered ? due_of(run, run->row) : last) - now);
        for (int each = 0; each < ready; each++) {
            serve(run, &run->events[each]);
            send_due(run); /* serving the other events first would delay it */
        }
    }
}

/* --- arguments and results --- */

static double read_argument(const char *text, double least, double most)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most))
        errx(2, "%s is not a number from %g to %g", text, least, most);
    return value;
}

static void *reserve(int64_t count, size_t size)
{
    void *room = calloc((size_t)count + 1, size);
    if (!room)
        err(1, "no memory");
    return room;
}

/* Read the requests, each after its length, as pacer.py writes them. */
static void read_requests(struct run *run, const char *path)
{
    FILE *file = fopen(path, "rb");
    char *line = NULL, *end;
    size_t room = 0;
    if (!file)
        err(1, "%s", path);
    while (getline(&line, &room, file) > 0) {
        size_t length = strtoull(line, &end, 10);
        char *start = *end == '\n' && length < MOST_LENGTH ? malloc(length + 1) : NULL;
        run->requests = realloc(run->requests, (run->requests_count + 1) * sizeof *run->requests);
        if (!run->requests || !start || fread(start, 1, length, file) != length)
            errx(1, "%s is not a file of requests", path);
        run->requests[run->requests_count++] = (struct bytes){start, length};
    }
    if (!run->requests_count)
        errx(1, "%s has no requests", path);
    free(line);
    fclose(file);
}

static int compare(const void *one, const void *other)
{
    int64_t left = *(const int64_t *)one, right = *(const int64_t *)other;
    return (left > right) - (left < right);
}

static void sort(struct times *times)
{
    qsort(times->values, (size_t)times->count, sizeof *times->values, compare);
}

/* In microseconds, of times that are sorted. */
static double at(const struct times *times, double share)
{
    int64_t place = (int64_t)(share * (double)times->count);
    if (place == times->count)
        place--;
    return place < 0 ? 0 : (double)times->values[place] / 1000;
}

static void tell(struct run *run, double seconds)
{
    struct times *latencies = &run->latencies, *lateness = &run->lateness;
    int64_t answered = latencies->count + run->errors;
    sort(latencies);
    sort(lateness);
    printf("{\"requests\": %" PRId64 ", \"seconds\": %.9f, ", answered, seconds);
    printf("\"p50_us\": %.3f, \"p99_us\": %.3f, \"p999_us\": %.3f, \"most_us\": %.3f, \"late_us\": %.3f, ",
           at(latencies, 0.5), at(latencies, 0.99), at(latencies, 0.999), at(latencies, 1), at(lateness, 0.99));
    printf("\"errors\": %" PRId64 ", \"unanswered\": %" PRId64 "}\n", run->errors, run->offered - answered);
}

/* The database works on the same core: it waits for what measures, and not the other way round. Asleep until something
 * is due, so that there is time for both. Where this is forbidden they compete, and late_us tells. */
static void take_precedence(void)
{
    const struct sched_param least = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_FIFO, &least);
    prctl(PR_SET_TIMERSLACK, 1000L, 0L, 0L, 0L); /* wake in time: the kernel's default is 50 us */
}

int main(int count, char **arguments)
{
    static struct run run;
    if (count != 6)
        errx(2, "usage: pacer PORT REQUESTS SECONDS CONNECTIONS RATE");
    uint16_t port = (uint16_t)read_argument(arguments[1], 1, UINT16_MAX);
    read_requests(&run, arguments[2]);
    double seconds = read_argument(arguments[3], 0, 86400);
    run.connections_count = (int64_t)read_argument(arguments[4], 1, UINT16_MAX);
    run.gap = 1e9 / read_argument(arguments[5], 1, 1e8);
    run.offered = (int64_t)(seconds * 1e9 / run.gap);
    run.latencies.values = reserve(run.offered, sizeof *run.latencies.values);
    run.lateness.values = reserve(run.offered, sizeof *run.lateness.values);
    run.events = reserve(run.connections_count, sizeof *run.events);
    run.connections = reserve(run.connections_count, sizeof *run.connections);
    run.poll = epoll_create1(EPOLL_CLOEXEC);
    for (int64_t each = 0; each < run.connections_count; each++) {
        run.connections[each].following = each;
        open_connection(&run, &run.connections[each], port);
    }
    take_precedence();
    follow_schedule(&run);
    tell(&run, (double)(now_ns() - run.began) / 1e9);
    return fflush(stdout) ? 1 : 0;
}
