// SPDX-License-Identifier: Apache-2.0
// The server of the transfer benchmark: implements the parts of S3 and GCS that the contestants use.
//
// Each connection has one thread.  After a real TLS 1.3 handshake, the keylog callback of OpenSSL provides
// the traffic secrets.  The program then skips the records of a body without decrypting them (MSG_TRUNC
// discards them in the kernel), and decrypts only records with a header or with the framing of a chunk.  So
// the clients get nearly all CPU time.  The program verifies nothing; the contract tests verify the bytes.
// With --hashing it decrypts every record and returns the CRC32C of the body, which clients of GCS compare.
//
// The program records only key and size of an object, for listings and HEAD.  A GET returns a pattern, or the
// file that --objects names for the key.  For each line on stdin it prints its counters as one line of JSON;
// at the end of stdin it prints them and exits.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    RECORD = 16384, TAG = 16, HEAD_MAX = 65536, OUT_RECORDS = 16, PATTERN = 1 << 20, PARTS_MAX = 10001,
    CAPTURE_MAX = 65536, BATCH = 1 << 17,
    SEALED = 5 + RECORD + 1 + TAG,
};

// ---------------------------------------------------------------- settings and counters

static double rate_bytes_s, link_bytes_s, latency_s, tail_s_max, share_503, share_stall, share_reset;
static bool is_hashing; // decrypts every record of a body and returns its CRC32C
static SSL_CTX *tls;  // NULL: plain HTTP
static int secrets_index;
static uint8_t *pattern;

static atomic_ullong bytes_in, bytes_out, whole_bytes;
static atomic_ullong made_503, made_stall, made_reset, fault_clock;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sleep_until(double when_s) {
    struct timespec t = {.tv_sec = (time_t)when_s};
    t.tv_nsec = (long)((when_s - (double)t.tv_sec) * 1e9);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

// ---------------------------------------------------------------- stored objects: keys and sizes

struct object { char *key; uint64_t size; char *content; };
struct upload { char *key; char id[32]; uint64_t sizes[PARTS_MAX]; uint32_t crc32c[PARTS_MAX]; };

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static struct object *objects;
static size_t object_count, object_room;
static struct upload **uploads;
static size_t upload_count, upload_room;

static void *grown(void *array, size_t count, size_t *room, size_t each) {
    if (count < *room) return array;
    *room = *room ? *room * 2 : 256;
    array = realloc(array, *room * each);
    if (!array) abort();
    return array;
}

static struct object *find_object(const char *key) {
    for (size_t i = 0; i < object_count; i++)
        if (!strcmp(objects[i].key, key)) return &objects[i];
    return NULL;
}

static void note_object(const char *key, uint64_t size, char *content) {
    struct object *found = find_object(key);
    if (!found) {
        objects = grown(objects, object_count, &object_room, sizeof *objects);
        found = &objects[object_count++];
        *found = (struct object){.key = strdup(key)};
    }
    free(found->content);
    found->size = size;
    found->content = content;
}

static void store_object(const char *key, uint64_t size, char *content) {
    pthread_mutex_lock(&registry);
    note_object(key, size, content);
    pthread_mutex_unlock(&registry);
    whole_bytes += size;
}

static struct upload *begin_upload(const char *key) {
    struct upload *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->key = strdup(key);
    pthread_mutex_lock(&registry);
    uploads = grown(uploads, upload_count, &upload_room, sizeof(struct upload *));
    snprintf(made->id, sizeof made->id, "upload%zu", upload_count);
    uploads[upload_count++] = made;
    pthread_mutex_unlock(&registry);
    return made;
}

static struct upload *find_upload(const char *id) {
    struct upload *found = NULL;
    pthread_mutex_lock(&registry);
    for (size_t i = 0; i < upload_count && !found; i++)
        if (!strcmp(uploads[i]->id, id)) found = uploads[i];
    pthread_mutex_unlock(&registry);
    return found;
}

// ---------------------------------------------------------------- one connection

struct direction { EVP_CIPHER_CTX *cipher; uint8_t iv[12]; uint64_t sequence; };
struct secrets { uint8_t client[32], server[32]; bool has_client, has_server; };

struct connection {
    int fd;
    struct direction in, out;
    uint8_t plain[RECORD + 256 + 1], record[5 + RECORD + 256 + TAG];
    size_t at, end;  // unread bytes in plain
    bool is_patient; // wakes up for BATCH bytes, not for each segment
    uint8_t *sealed; // room for OUT_RECORDS records
    double body_began_s;
    uint64_t body_bytes;
    uint32_t crc32c; // of the body, with --hashing
};

static bool receive(int fd, void *into, size_t size, int flags) {
    while (size) {
        ssize_t got = recv(fd, into, size, flags | MSG_WAITALL);
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            return false;
        }
        if (!(flags & MSG_TRUNC)) into = (uint8_t *)into + got;
        size -= (size_t)got;
    }
    return true;
}

static bool transmit(int fd, const uint8_t *data, size_t size) {
    while (size) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            return false;
        }
        data += sent;
        size -= (size_t)sent;
    }
    return true;
}

// HKDF-Expand-Label of RFC 8446 for outputs of at most one SHA-256 block.
static void expand(const uint8_t *secret, const char *label, uint8_t *out, size_t size) {
    uint8_t info[64], block[EVP_MAX_MD_SIZE];
    size_t labelled = strlen(label) + 6, length = 0;
    info[length++] = 0;
    info[length++] = (uint8_t)size;
    info[length++] = (uint8_t)labelled;
    memcpy(info + length, "tls13 ", 6);
    memcpy(info + length + 6, label, labelled - 6);
    length += labelled;
    info[length++] = 0; // no context
    info[length++] = 1; // first block
    HMAC(EVP_sha256(), secret, 32, info, length, block, NULL);
    memcpy(out, block, size);
}

static void prepare(struct direction *d, const uint8_t *secret, bool encrypt) {
    uint8_t key[16];
    expand(secret, "key", key, sizeof key);
    expand(secret, "iv", d->iv, sizeof d->iv);
    d->cipher = EVP_CIPHER_CTX_new();
    EVP_CipherInit_ex(d->cipher, EVP_aes_128_gcm(), NULL, key, NULL, encrypt);
}

static void next_nonce(struct direction *d, bool encrypt) {
    uint8_t nonce[12];
    memcpy(nonce, d->iv, 12);
    for (int i = 0; i < 8; i++) nonce[11 - i] ^= (uint8_t)(d->sequence >> (8 * i));
    d->sequence++;
    EVP_CipherInit_ex(d->cipher, NULL, NULL, NULL, nonce, encrypt);
}

static void take_secret(const SSL *ssl, const char *line) {
    struct secrets *into = SSL_get_ex_data(ssl, secrets_index);
    uint8_t *secret;
    if (!strncmp(line, "CLIENT_TRAFFIC_SECRET_0 ", 24)) {
        secret = into->client;
        into->has_client = true;
    } else if (!strncmp(line, "SERVER_TRAFFIC_SECRET_0 ", 24)) {
        secret = into->server;
        into->has_server = true;
    } else {
        return;
    }
    const char *hex = strrchr(line, ' ') + 1;
    for (int i = 0; i < 32; i++) sscanf(hex + 2 * i, "%2hhx", &secret[i]);
}

static bool handshake(struct connection *c) {
    struct secrets got = {0};
    SSL *ssl = SSL_new(tls);
    SSL_set_ex_data(ssl, secrets_index, &got);
    SSL_set_fd(ssl, c->fd);
    bool is_done = SSL_accept(ssl) == 1 && got.has_client && got.has_server;
    SSL_set_quiet_shutdown(ssl, 1);
    SSL_free(ssl); // SSL does not own the socket, which stays open
    if (is_done) {
        prepare(&c->in, got.client, false);
        prepare(&c->out, got.server, true);
    }
    return is_done;
}

static bool record_size(struct connection *c, size_t *size) {
    if (!receive(c->fd, c->record, 5, 0)) return false;
    *size = (size_t)c->record[3] << 8 | c->record[4];
    return c->record[0] == 23 && *size > TAG && *size <= RECORD + 256;
}

// Read and decrypt the record whose header is in c->record.
static bool open_record(struct connection *c, size_t size) {
    if (!receive(c->fd, c->record + 5, size, 0)) return false;
    int got = 0, rest = 0;
    next_nonce(&c->in, false);
    EVP_CIPHER_CTX_ctrl(c->in.cipher, EVP_CTRL_GCM_SET_TAG, TAG, c->record + 5 + size - TAG);
    EVP_DecryptUpdate(c->in.cipher, NULL, &got, c->record, 5);
    EVP_DecryptUpdate(c->in.cipher, c->plain, &got, c->record + 5, (int)(size - TAG));
    if (EVP_DecryptFinal_ex(c->in.cipher, c->plain + got, &rest) != 1) return false;
    while (got > 0 && !c->plain[got - 1]) got--; // padding
    if (got <= 0 || c->plain[got - 1] != 23) return false; // an alert, or an unsupported key update
    c->at = 0;
    c->end = (size_t)got - 1;
    return true;
}

// Have at least one byte in plain.
static bool fill(struct connection *c) {
    size_t size;
    if (tls) {
        do {
            if (!record_size(c, &size) || !open_record(c, size)) return false;
        } while (c->at == c->end);
        return true;
    }
    ssize_t got = recv(c->fd, c->plain, RECORD, 0);
    c->at = 0;
    c->end = got > 0 ? (size_t)got : 0;
    return got > 0;
}

// The instant at which a link that all connections share has carried these bytes.
static double link_free_s(size_t size) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static double free_s;
    pthread_mutex_lock(&lock);
    double began_s = free_s > now_s() ? free_s : now_s();
    free_s = began_s + (double)size / link_bytes_s;
    double due_s = free_s;
    pthread_mutex_unlock(&lock);
    return due_s;
}

static void pace(struct connection *c, size_t size) {
    c->body_bytes += size;
    double due_s = rate_bytes_s > 0 ? c->body_began_s + (double)c->body_bytes / rate_bytes_s : 0;
    if (link_bytes_s > 0) {
        double free_s = link_free_s(size);
        if (free_s > due_s) due_s = free_s;
    }
    if (due_s > now_s() + 1e-3) sleep_until(due_s);
}

static void arrived(struct connection *c, size_t size) {
    bytes_in += size;
    pace(c, size);
}

static uint32_t crc32c_table[256];

static void make_crc32c_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0);
        crc32c_table[i] = value;
    }
}

#ifdef __x86_64__
__attribute__((target("sse4.2")))
#endif
static uint32_t crc32c_more(uint32_t value, const uint8_t *data, size_t size) {
    value = ~value;
#ifdef __x86_64__
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        value = (uint32_t)__builtin_ia32_crc32di(value, word);
    }
#endif
    for (; size; data++, size--) value = value >> 8 ^ crc32c_table[(value ^ *data) & 255];
    return ~value;
}

// The product of two polynomials modulo that of CRC32C; the highest bit is x to the power of zero.
static uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) sum ^= b;
        b = b >> 1 ^ (b & 1 ? 0x82f63b78u : 0);
    }
    return sum;
}

// The CRC32C of two successive runs of bytes.
static uint32_t crc32c_joined(uint32_t first, uint32_t second, uint64_t second_bytes) {
    uint32_t power = 1u << 23; // x to the power of eight: one byte
    for (; second_bytes; second_bytes >>= 1, power = product(power, power))
        if (second_bytes & 1) first = product(power, first);
    return first ^ second;
}

// Let the kernel wake this thread only for BATCH bytes, if at least that many will follow.
static void wait_for_batches(struct connection *c, bool is_patient) {
    if (c->is_patient == is_patient) return;
    c->is_patient = is_patient;
    setsockopt(c->fd, SOL_SOCKET, SO_RCVLOWAT, &(int){is_patient ? BATCH : 1}, sizeof(int));
}

// Skip the next bytes of a body.
static bool skip(struct connection *c, uint64_t size) {
    while (size) {
        // The margin covers a half-read record: BATCH bytes must still be in flight.
        wait_for_batches(c, tls && size >= BATCH + 2 * SEALED);
        if (c->at < c->end) {
            uint64_t here = c->end - c->at < size ? c->end - c->at : size;
            if (is_hashing) c->crc32c = crc32c_more(c->crc32c, c->plain + c->at, here);
            c->at += here;
            size -= here;
            arrived(c, here);
        } else if (is_hashing) {
            if (!fill(c)) return false;
        } else if (tls) {
            size_t sealed;
            if (!record_size(c, &sealed)) return false;
            size_t inside = sealed - TAG - 1;
            if (inside > size) { // the record also contains bytes after the body
                if (!open_record(c, sealed)) return false;
                continue;
            }
            if (!receive(c->fd, c->record + 5, sealed, MSG_TRUNC)) return false;
            c->in.sequence++;
            size -= inside;
            arrived(c, inside);
        } else {
            size_t here = size < 1 << 18 ? (size_t)size : 1 << 18;
            if (!receive(c->fd, NULL, here, MSG_TRUNC)) return false;
            size -= here;
            arrived(c, here);
        }
    }
    wait_for_batches(c, false);
    return true;
}

static bool take(struct connection *c, char *into, size_t size) {
    bytes_in += size;
    while (size) {
        if (c->at == c->end && !fill(c)) return false;
        size_t here = c->end - c->at < size ? c->end - c->at : size;
        memcpy(into, c->plain + c->at, here);
        if (is_hashing) c->crc32c = crc32c_more(c->crc32c, c->plain + c->at, here);
        c->at += here;
        into += here;
        size -= here;
    }
    return true;
}

static bool take_line(struct connection *c, char *into, size_t room) {
    for (size_t used = 0; used + 1 < room; used++) {
        if (c->at == c->end && !fill(c)) return false;
        into[used] = (char)c->plain[c->at++];
        if (into[used] == '\n') {
            into[used] = 0;
            if (used && into[used - 1] == '\r') into[used - 1] = 0;
            return true;
        }
    }
    return false;
}

// Send at most OUT_RECORDS records of plaintext at once.
static bool say(struct connection *c, const void *data, size_t size) {
    const uint8_t *from = data;
    if (!tls) return transmit(c->fd, from, size);
    while (size) {
        uint8_t *to = c->sealed;
        for (int i = 0; i < OUT_RECORDS && size; i++) {
            size_t here = size < RECORD ? size : RECORD, wire = here + 1 + TAG;
            int got = 0;
            uint8_t type = 23;
            memcpy(to, (uint8_t[]){23, 3, 3, (uint8_t)(wire >> 8), (uint8_t)wire}, 5);
            next_nonce(&c->out, true);
            EVP_EncryptUpdate(c->out.cipher, NULL, &got, to, 5);
            EVP_EncryptUpdate(c->out.cipher, to + 5, &got, from, (int)here);
            EVP_EncryptUpdate(c->out.cipher, to + 5 + here, &got, &type, 1);
            EVP_EncryptFinal_ex(c->out.cipher, to + 5 + here + 1, &got);
            EVP_CIPHER_CTX_ctrl(c->out.cipher, EVP_CTRL_GCM_GET_TAG, TAG, to + 5 + here + 1);
            to += 5 + wire;
            from += here;
            size -= here;
        }
        if (!transmit(c->fd, c->sealed, (size_t)(to - c->sealed))) return false;
    }
    return true;
}

// ---------------------------------------------------------------- requests

struct request {
    char head[HEAD_MAX];
    char *method, *path, *query, *headers;
    char key[2048];              // bucket/name, decoded
    uint64_t size_bytes;         // of the object or part in the body
    char captured[CAPTURE_MAX + 1]; // a small body, or the start of a larger one
    size_t captured_bytes;
    bool wants_close;
};

// The value of a header, in a buffer of this thread; NULL if it is missing.
static const char *header(const struct request *r, const char *name) {
    static _Thread_local char values[4][1024];
    static _Thread_local int turn;
    size_t length = strlen(name);
    for (const char *line = r->headers; line && *line; line = strstr(line, "\r\n") + 2) {
        const char *end = strstr(line, "\r\n");
        if (!end) break;
        if (!strncasecmp(line, name, length) && line[length] == ':') {
            char *value = values[turn++ % 4];
            const char *from = line + length + 1;
            while (*from == ' ') from++;
            snprintf(value, sizeof values[0], "%.*s", (int)(end - from), from);
            return value;
        }
    }
    return NULL;
}

static void decode(const char *from, size_t size, char *to, size_t room) {
    size_t used = 0;
    for (size_t i = 0; i < size && used + 1 < room; i++) {
        unsigned byte;
        if (from[i] == '%' && i + 2 < size && sscanf(from + i + 1, "%2x", &byte) == 1) {
            to[used++] = (char)byte;
            i += 2;
        } else {
            to[used++] = from[i] == '+' ? ' ' : from[i];
        }
    }
    to[used] = 0;
}

// Whether the query has this name; its decoded value is written to value.
static bool query(const struct request *r, const char *name, char *value, size_t room) {
    size_t length = strlen(name);
    for (const char *at = r->query; at && *at;) {
        size_t size = strcspn(at, "&");
        if (!strncmp(at, name, length) && (at[length] == '=' || length == size)) {
            if (value) {
                bool has_value = at[length] == '=';
                decode(at + length + has_value, size - length - has_value, value, room);
            }
            return true;
        }
        at += size;
        if (*at) at++;
    }
    return false;
}

static double draw(void) { // uniform in [0, 1)
    uint64_t x = (atomic_fetch_add(&fault_clock, 1) + 1) * 0x9e3779b97f4a7c15u; // splitmix64: the same each run
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

// The delay of one answer: with a tail, Pareto-distributed with the exponent 1.
static double delay_s(void) {
    if (tail_s_max <= 0) return latency_s;
    double delay = latency_s / (1 - draw());
    return delay < tail_s_max ? delay : tail_s_max;
}

static bool answer(struct connection *c, const struct request *r, const char *status, const char *extra,
                   const char *body) {
    char text[HEAD_MAX];
    size_t size = body ? strlen(body) : 0;
    bool has_length = strncmp(status, "204", 3) && !(extra && strcasestr(extra, "content-length:"));
    int used = snprintf(text, sizeof text, "HTTP/1.1 %s\r\nServer: sink\r\nx-amz-request-id: 1\r\n%s", status,
                        extra ? extra : "");
    if (has_length) used += snprintf(text + used, sizeof text - (size_t)used, "Content-Length: %zu\r\n", size);
    used += snprintf(text + used, sizeof text - (size_t)used, "\r\n");
    if (latency_s > 0) sleep_until(now_s() + delay_s());
    bool is_head = !strcmp(r->method, "HEAD");
    if (size && !is_head && (size_t)used + size < sizeof text) { // one segment for a small answer
        memcpy(text + used, body, size);
        return say(c, text, (size_t)used + size);
    }
    return say(c, text, (size_t)used) && (is_head || !size || say(c, body, size));
}

__attribute__((format(printf, 5, 6))) static bool answer_with(struct connection *c, const struct request *r,
                                                              const char *status, const char *extra,
                                                              const char *format, ...) {
    char body[8192];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(body, sizeof body, format, arguments);
    va_end(arguments);
    return answer(c, r, status, extra, body);
}

#define XML "Content-Type: application/xml\r\n"
#define JSON "Content-Type: application/json; charset=UTF-8\r\n"
#define ETAG "\"0123456789abcdef0123456789abcdef-1\""
#define MODIFIED "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"

// The CRC32C as a header of GCS.
static size_t say_crc32c(uint32_t value, char *into, size_t room) {
    uint8_t bytes[4] = {(uint8_t)(value >> 24), (uint8_t)(value >> 16), (uint8_t)(value >> 8), (uint8_t)value};
    unsigned char text[16];
    EVP_EncodeBlock(text, bytes, 4);
    return (size_t)snprintf(into, room, "x-goog-hash: crc32c=%s\r\n", text);
}

static void echo_checksums(const struct connection *c, const struct request *r, char *into, size_t room) {
    static const char *const names[] = {"x-amz-checksum-crc32", "x-amz-checksum-crc32c",
                                        "x-amz-checksum-crc64nvme", "x-goog-hash"};
    size_t used = (size_t)snprintf(into, room, "ETag: " ETAG "\r\n");
    if (is_hashing) {
        say_crc32c(c->crc32c, into + used, room - used);
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = header(r, names[i]);
        if (value) used += (size_t)snprintf(into + used, room - used, "%s: %s\r\n", names[i], value);
    }
}

static int by_key(const void *a, const void *b) {
    return strcmp(((const struct object *)a)->key, ((const struct object *)b)->key);
}

// The objects below bucket/prefix, at most 1,000 per page, in the format of S3 or GCS.
static bool answer_list(struct connection *c, const struct request *r, const char *bucket, bool is_json) {
    char prefix[1024] = "", from[1024] = "", start[2048];
    char *body = NULL;
    size_t size = 0, shown = 0, skipped = strlen(bucket) + 1;
    const char *last = NULL;
    query(r, "prefix", prefix, sizeof prefix);
    if (!query(r, "continuation-token", from, sizeof from) && !query(r, "pageToken", from, sizeof from))
        query(r, "start-after", from, sizeof from);
    snprintf(start, sizeof start, "%s/%s", bucket, prefix);
    FILE *out = open_memstream(&body, &size);
    fprintf(out, is_json ? "{\"kind\":\"storage#objects\",\"items\":["
                         : "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult "
                           "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>%s</Name>", bucket);
    pthread_mutex_lock(&registry);
    qsort(objects, object_count, sizeof *objects, by_key);
    bool is_cut = false;
    for (size_t i = 0; i < object_count; i++) {
        const struct object *o = &objects[i];
        if (strncmp(o->key, start, strlen(start)) || strcmp(o->key + skipped, from) <= 0) continue;
        if (shown == 1000) {
            is_cut = true;
            break;
        }
        if (is_json)
            fprintf(out, "%s{\"kind\":\"storage#object\",\"name\":\"%s\",\"size\":\"%llu\",\"generation\":\"1\"}",
                    shown ? "," : "", o->key + skipped, (unsigned long long)o->size);
        else
            fprintf(out, "<Contents><Key>%s</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                         "<ETag>&quot;%.*s&quot;</ETag><Size>%llu</Size><StorageClass>STANDARD</StorageClass>"
                         "</Contents>", o->key + skipped, (int)sizeof ETAG - 3, ETAG + 1,
                    (unsigned long long)o->size);
        last = o->key + skipped;
        shown++;
    }
    if (is_json)
        fprintf(out, is_cut ? "],\"nextPageToken\":\"%s\"}" : "]}", last);
    else
        fprintf(out, "<KeyCount>%zu</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>%s</IsTruncated>"
                     "%s%s%s</ListBucketResult>", shown, is_cut ? "true" : "false",
                is_cut ? "<NextContinuationToken>" : "", is_cut ? last : "", is_cut ? "</NextContinuationToken>" : "");
    pthread_mutex_unlock(&registry);
    fclose(out);
    bool is_sent = answer(c, r, "200 OK", is_json ? JSON : XML, body);
    free(body);
    return is_sent;
}

static bool answer_error(struct connection *c, const struct request *r, const char *status, const char *code) {
    return answer_with(c, r, status, XML, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>%s</Code>"
                       "<Message>said the sink</Message><RequestId>1</RequestId></Error>", code);
}

static bool answer_metadata(struct connection *c, const struct request *r, const char *key, uint64_t size,
                            const char *crc32c) {
    const char *slash = strchr(key, '/');
    return answer_with(c, r, "200 OK", JSON,
                       "{\"kind\":\"storage#object\",\"bucket\":\"%.*s\",\"name\":\"%s\",\"size\":\"%llu\","
                       "\"generation\":\"1\",\"metageneration\":\"1\",\"etag\":\"1\"%s%s%s}",
                       (int)(slash ? slash - key : 0), key, slash ? slash + 1 : key, (unsigned long long)size,
                       crc32c ? ",\"crc32c\":\"" : "", crc32c ? crc32c : "", crc32c ? "\"" : "");
}

enum fate { GOOD, FATE_503, FATE_STALL, FATE_RESET };

static enum fate draw_fate(void) {
    double u = draw();
    if (u < share_503) return FATE_503;
    if (u < share_503 + share_stall) return FATE_STALL;
    if (u < share_503 + share_stall + share_reset) return FATE_RESET;
    return GOOD;
}

// Send nothing more until the client closes the connection; always false.
static bool fall_silent(struct connection *c) {
    made_stall++;
    struct pollfd p = {.fd = c->fd, .events = POLLRDHUP};
    poll(&p, 1, 600000);
    return false;
}

static bool break_off(struct connection *c) {
    made_reset++;
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
    return false;
}

static bool answer_bytes(struct connection *c, const struct request *r, const char *key) {
    pthread_mutex_lock(&registry);
    const struct object *found = find_object(key);
    uint64_t size = found ? found->size : 0;
    const char *content = found ? found->content : NULL;
    pthread_mutex_unlock(&registry);
    if (!found) return answer_error(c, r, "404 Not Found", "NoSuchKey");
    unsigned long long first = 0, last = size ? size - 1 : 0, suffix;
    const char *range = header(r, "range");
    bool is_part = false;
    if (range && sscanf(range, "bytes=-%llu", &suffix) == 1) {
        first = suffix < size ? size - suffix : 0;
        is_part = true;
    } else if (range && sscanf(range, "bytes=%llu-%llu", &first, &last) >= 1) {
        is_part = true;
    }
    if (is_part && first >= size) return answer_error(c, r, "416 Range Not Satisfiable", "InvalidRange");
    if (last >= size) last = size ? size - 1 : 0;
    uint64_t left = size ? last - first + 1 : 0;
    char extra[512], span[128] = "";
    if (is_part) snprintf(span, sizeof span, "Content-Range: bytes %llu-%llu/%llu\r\n", first, last, (unsigned long long)size);
    snprintf(extra, sizeof extra, "ETag: " ETAG "\r\n" MODIFIED "Accept-Ranges: bytes\r\nx-goog-generation: 1\r\n"
             "Content-Type: application/octet-stream\r\n%sContent-Length: %llu\r\n", span, (unsigned long long)left);
    enum fate fate = strcmp(r->method, "HEAD") ? draw_fate() : GOOD;
    if (fate == FATE_503) {
        made_503++;
        return answer_error(c, r, "503 Slow Down", "SlowDown");
    }
    if (!answer(c, r, is_part ? "206 Partial Content" : "200 OK", extra, NULL)) return false;
    if (!strcmp(r->method, "HEAD")) return true;
    uint64_t good = fate == GOOD ? 0 : left / 2, at = first;
    c->body_began_s = now_s();
    c->body_bytes = 0;
    while (left > good) {
        size_t here = content ? (size_t)left : PATTERN - at % PATTERN;
        if (here > left) here = (size_t)left;
        if (here > 1 << 18) here = 1 << 18;
        if (!say(c, content ? content + at : (char *)pattern + at % PATTERN, here)) return false;
        bytes_out += here;
        pace(c, here);
        at += here;
        left -= here;
    }
    return fate == GOOD || (fate == FATE_STALL ? fall_silent(c) : break_off(c));
}

// ---- GCS, JSON

// A string value at the start of a JSON body; leaves into unchanged if it is missing.
static void json_string(const char *text, const char *name, char *into, size_t room) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "\"%s\"", name);
    const char *at = strstr(text, wanted);
    if (!at || !(at = strchr(at + strlen(wanted), '"'))) return;
    snprintf(into, room, "%.*s", (int)strcspn(at + 1, "\""), at + 1);
}

static bool gcs_upload(struct connection *c, struct request *r, const char *bucket) {
    char kind[32] = "", id[32] = "", name[1024] = "", key[2048], extra[512], crc[32] = "";
    query(r, "uploadType", kind, sizeof kind);
    if (query(r, "upload_id", id, sizeof id)) {
        struct upload *upload = find_upload(id);
        if (!upload) return answer(c, r, "404 Not Found", NULL, NULL);
        unsigned long long first, last, total;
        const char *range = header(r, "content-range");
        uint64_t end = r->size_bytes;
        if (range && sscanf(range, "bytes %llu-%llu/%llu", &first, &last, &total) != 3) {
            if (sscanf(range, "bytes %llu-%llu/", &first, &last) == 2) end = last + 1;
            snprintf(extra, sizeof extra, "Range: bytes=0-%llu\r\n", (unsigned long long)(end - 1));
            return answer(c, r, "308 Resume Incomplete", extra, NULL);
        }
        if (range && last + 1 < total) {
            snprintf(extra, sizeof extra, "Range: bytes=0-%llu\r\n", last);
            return answer(c, r, "308 Resume Incomplete", extra, NULL);
        }
        if (range) end = total;
        store_object(upload->key, end, NULL);
        const char *hash = header(r, "x-goog-hash");
        return answer_metadata(c, r, upload->key, end, hash && !strncmp(hash, "crc32c=", 7) ? hash + 7 : NULL);
    }
    if (!query(r, "name", name, sizeof name)) json_string(r->captured, "name", name, sizeof name);
    snprintf(key, sizeof key, "%s/%s", bucket, name);
    if (!strcmp(kind, "resumable")) {
        const char *host = header(r, "host");
        snprintf(extra, sizeof extra, "Location: %s://%s/upload/storage/v1/b/%s/o?uploadType=resumable&upload_id=%s\r\n",
                 tls ? "https" : "http", host ? host : "localhost", bucket, begin_upload(key)->id);
        return answer(c, r, "200 OK", extra, NULL);
    }
    uint64_t size = r->size_bytes;
    if (!strcmp(kind, "multipart")) { // metadata, then the object: subtract the metadata and the framing
        const char *body = strstr(r->captured, "\r\n\r\n");
        body = body ? strstr(body + 4, "\r\n\r\n") : NULL;
        const char *line = strstr(r->captured, "\r\n");
        if (body && line) size -= (size_t)(body + 4 - r->captured) + (size_t)(line - r->captured) + 4;
        json_string(r->captured, "crc32c", crc, sizeof crc);
    }
    store_object(key, size, NULL);
    return answer_metadata(c, r, key, size, *crc ? crc : NULL);
}

static bool gcs_request(struct connection *c, struct request *r, char *rest) {
    // rest: b/BUCKET, b/BUCKET/o or b/BUCKET/o/NAME
    char bucket[256], key[2048];
    size_t length = strcspn(rest + 2, "/");
    snprintf(bucket, sizeof bucket, "%.*s", (int)length, rest + 2);
    char *name = rest + 2 + length;
    if (!*name) return answer_with(c, r, "200 OK", JSON, "{\"kind\":\"storage#bucket\",\"name\":\"%s\"}", bucket);
    if (strlen(name) <= 3) {
        return strcmp(r->method, "GET") ? answer(c, r, "400 Bad Request", NULL, NULL) : answer_list(c, r, bucket, true);
    }
    int used = snprintf(key, sizeof key, "%s/", bucket);
    decode(name + 3, strlen(name + 3), key + used, sizeof key - (size_t)used);
    char alt[16] = "";
    if (!strcmp(r->method, "DELETE")) return answer(c, r, "204 No Content", NULL, NULL);
    if (query(r, "alt", alt, sizeof alt) && !strcmp(alt, "media")) return answer_bytes(c, r, key);
    pthread_mutex_lock(&registry);
    const struct object *found = find_object(key);
    uint64_t size = found ? found->size : 0;
    pthread_mutex_unlock(&registry);
    if (!found)
        return answer(c, r, "404 Not Found", JSON, "{\"error\":{\"code\":404,\"message\":\"No such object\"}}");
    return answer_metadata(c, r, key, size, NULL);
}

// ---- S3, and the XML API of GCS, which is the same thing

static bool s3_put(struct connection *c, struct request *r) {
    char number[16], id[32], extra[1024];
    echo_checksums(c, r, extra, sizeof extra);
    if (query(r, "partNumber", number, sizeof number) && query(r, "uploadId", id, sizeof id)) {
        struct upload *upload = find_upload(id);
        long part = atol(number);
        if (!upload || part < 1 || part >= PARTS_MAX) return answer_error(c, r, "404 Not Found", "NoSuchUpload");
        upload->sizes[part] = r->size_bytes;
        upload->crc32c[part] = c->crc32c;
        return answer(c, r, "200 OK", extra, NULL);
    }
    bool is_kept = r->captured_bytes == r->size_bytes && r->size_bytes;
    char *kept = NULL;
    if (is_kept && (kept = malloc(r->size_bytes))) memcpy(kept, r->captured, r->size_bytes);
    store_object(r->key, r->size_bytes, kept);
    return answer(c, r, "200 OK", extra, NULL);
}

static bool s3_post(struct connection *c, struct request *r) {
    char id[32];
    const char *slash = strchr(r->key, '/');
    const char *name = slash ? slash + 1 : "";
    int bucket = slash ? (int)(slash - r->key) : 0;
    if (query(r, "uploads", NULL, 0))
        return answer_with(c, r, "200 OK", XML, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><InitiateMultipartUploadResult "
                           "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>%.*s</Bucket><Key>%s</Key>"
                           "<UploadId>%s</UploadId></InitiateMultipartUploadResult>", bucket, r->key, name,
                           begin_upload(r->key)->id);
    struct upload *upload = query(r, "uploadId", id, sizeof id) ? find_upload(id) : NULL;
    if (!upload) return answer_error(c, r, "404 Not Found", "NoSuchUpload");
    uint64_t size = 0;
    uint32_t crc32c = 0;
    for (int i = 1; i < PARTS_MAX; i++) {
        size += upload->sizes[i];
        crc32c = upload->sizes[i] ? crc32c_joined(crc32c, upload->crc32c[i], upload->sizes[i]) : crc32c;
    }
    store_object(upload->key, size, NULL);
    char extra[128] = XML;
    if (is_hashing) say_crc32c(crc32c, extra + sizeof XML - 1, sizeof extra - sizeof XML);
    return answer_with(c, r, "200 OK", extra, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><CompleteMultipartUploadResult "
                       "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Location>/%s</Location><Bucket>%.*s</Bucket>"
                       "<Key>%s</Key><ETag>&quot;%.*s&quot;</ETag></CompleteMultipartUploadResult>", r->key, bucket,
                       r->key, name, (int)sizeof ETAG - 5, ETAG + 1);
}

// The parts of an upload, on one page.
static bool s3_parts(struct connection *c, struct request *r, const char *id) {
    struct upload *upload = find_upload(id);
    if (!upload) return answer_error(c, r, "404 Not Found", "NoSuchUpload");
    char *body = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&body, &size);
    fprintf(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListPartsResult "
                 "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><IsTruncated>false</IsTruncated>");
    for (int i = 1; i < PARTS_MAX; i++)
        if (upload->sizes[i])
            fprintf(out, "<Part><PartNumber>%d</PartNumber><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                         "<ETag>&quot;%.*s&quot;</ETag><Size>%llu</Size></Part>", i, (int)sizeof ETAG - 3, ETAG + 1,
                    (unsigned long long)upload->sizes[i]);
    fprintf(out, "</ListPartsResult>");
    fclose(out);
    bool is_sent = answer(c, r, "200 OK", XML, body);
    free(body);
    return is_sent;
}

static bool respond(struct connection *c, struct request *r) {
    static const char upload_api[] = "/upload/storage/v1/b/", api[] = "/storage/v1/", get_api[] = "/download/storage/v1/";
    if (!strncmp(r->path, upload_api, sizeof upload_api - 1)) {
        char bucket[256];
        const char *from = r->path + sizeof upload_api - 1;
        snprintf(bucket, sizeof bucket, "%.*s", (int)strcspn(from, "/"), from);
        return gcs_upload(c, r, bucket);
    }
    if (!strncmp(r->path, api, sizeof api - 1)) return gcs_request(c, r, r->path + sizeof api - 1);
    if (!strncmp(r->path, get_api, sizeof get_api - 1)) return gcs_request(c, r, r->path + sizeof get_api - 1);
    if (!strcmp(r->path, "/token"))
        return answer(c, r, "200 OK", JSON, "{\"access_token\":\"t\",\"expires_in\":3600,\"token_type\":\"Bearer\"}");
    decode(r->path + 1, strlen(r->path + 1), r->key, sizeof r->key);
    char *slash = strchr(r->key, '/');
    bool is_bucket = !slash || !slash[1];
    if (is_bucket) {
        if (slash) *slash = 0;
        if (!strcmp(r->method, "GET") && !query(r, "location", NULL, 0) && !query(r, "uploads", NULL, 0))
            return answer_list(c, r, r->key, false);
        if (query(r, "location", NULL, 0))
            return answer(c, r, "200 OK", XML, "<LocationConstraint xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"/>");
        if (query(r, "uploads", NULL, 0) && !strcmp(r->method, "GET"))
            return answer(c, r, "200 OK", XML, "<ListMultipartUploadsResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
                          "<IsTruncated>false</IsTruncated></ListMultipartUploadsResult>");
        return answer(c, r, "200 OK", NULL, NULL);
    }
    if (!strcmp(r->method, "PUT")) return s3_put(c, r);
    if (!strcmp(r->method, "POST")) return s3_post(c, r);
    if (!strcmp(r->method, "DELETE")) return answer(c, r, "204 No Content", NULL, NULL);
    char id[32];
    if (!strcmp(r->method, "GET") && query(r, "uploadId", id, sizeof id)) return s3_parts(c, r, id);
    return answer_bytes(c, r, r->key);
}

// ---------------------------------------------------------------- reading a request

static bool read_head(struct connection *c, struct request *r) {
    size_t used = 0;
    for (;;) {
        if (c->at == c->end && !fill(c)) return false;
        while (c->at < c->end) {
            if (used + 1 >= sizeof r->head) return false;
            r->head[used++] = (char)c->plain[c->at++];
            if (used >= 4 && !memcmp(r->head + used - 4, "\r\n\r\n", 4)) {
                r->head[used - 2] = 0; // each header line ends in CRLF
                r->method = r->head;
                r->path = strchr(r->head, ' ');
                if (!r->path) return false;
                *r->path++ = 0;
                char *end = strchr(r->path, ' ');
                r->headers = end ? strstr(end + 1, "\r\n") : NULL;
                if (!r->headers) return false;
                *end = 0;
                r->headers += 2;
                r->query = strchr(r->path, '?');
                if (r->query) *r->query++ = 0;
                return true;
            }
        }
    }
}

// Read or skip a body of known length; only half of it for a stall or a reset.
static bool read_sized(struct connection *c, struct request *r, uint64_t size, enum fate fate) {
    if (fate == FATE_STALL || fate == FATE_RESET) {
        if (!skip(c, size / 2)) return false;
        return fate == FATE_STALL ? fall_silent(c) : break_off(c);
    }
    bool is_gcs_form = !strcmp(r->method, "POST") && !strncmp(r->path, "/upload/", 8);
    size_t wanted = size <= CAPTURE_MAX ? (size_t)size : is_gcs_form ? 2048 : 0;
    if (!take(c, r->captured, wanted)) return false;
    r->captured_bytes = wanted;
    r->captured[wanted] = 0;
    return skip(c, size - wanted);
}

static bool read_chunked(struct connection *c, struct request *r, enum fate fate) {
    char line[1024];
    for (uint64_t total = 0;;) {
        if (!take_line(c, line, sizeof line)) return false;
        uint64_t size = strtoull(line, NULL, 16);
        if (!size) break;
        if ((fate == FATE_STALL || fate == FATE_RESET) && total >= r->size_bytes / 2)
            return fate == FATE_STALL ? fall_silent(c) : break_off(c);
        total += size;
        if (!skip(c, size) || !take_line(c, line, sizeof line)) return false;
        if (!header(r, "x-amz-decoded-content-length")) r->size_bytes = total;
    }
    do {
        if (!take_line(c, line, sizeof line)) return false;
    } while (*line);
    return true;
}

static bool serve_one(struct connection *c, struct request *r) {
    if (!read_head(c, r)) return false;
    const char *length = header(r, "content-length"), *coding = header(r, "transfer-encoding");
    const char *decoded = header(r, "x-amz-decoded-content-length"), *link = header(r, "connection");
    uint64_t size = length ? strtoull(length, NULL, 10) : 0;
    bool is_chunked = coding && strcasestr(coding, "chunked");
    r->wants_close = link && strcasestr(link, "close");
    r->size_bytes = decoded ? strtoull(decoded, NULL, 10) : size;
    r->captured_bytes = 0;
    r->captured[0] = 0;
    const char *expect = header(r, "expect");
    if (expect && !say(c, "HTTP/1.1 100 Continue\r\n\r\n", 25)) return false;
    enum fate fate = !strcmp(r->method, "PUT") && r->size_bytes ? draw_fate() : GOOD;
    c->body_began_s = now_s();
    c->body_bytes = 0;
    c->crc32c = 0;
    if (!(is_chunked ? read_chunked(c, r, fate) : read_sized(c, r, size, fate))) return false;
    if (fate == FATE_503) {
        made_503++;
        return answer_error(c, r, "503 Slow Down", "SlowDown");
    }
    return respond(c, r) && !r->wants_close;
}

static void *serve(void *argument) {
    struct connection *c = calloc(1, sizeof *c);
    struct request *r = calloc(1, sizeof *r);
    if (!c || !r) abort();
    c->fd = (int)(intptr_t)argument;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    c->sealed = tls ? malloc((size_t)OUT_RECORDS * SEALED) : NULL;
    if (!tls || handshake(c))
        while (serve_one(c, r)) {}
    close(c->fd);
    EVP_CIPHER_CTX_free(c->in.cipher);
    EVP_CIPHER_CTX_free(c->out.cipher);
    free(c->sealed);
    free(c);
    free(r);
    return NULL;
}

static void *accept_all(void *argument) {
    int listener = (int)(intptr_t)argument;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&detached, 512 * 1024);
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        if (fd >= 0 && pthread_create(&thread, &detached, serve, (void *)(intptr_t)fd)) close(fd);
    }
    return NULL;
}

// ---------------------------------------------------------------- the process

static void print_counters(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                   (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    printf("{\"cpu_s\":%.4f,\"bytes_in\":%llu,\"bytes_out\":%llu,\"whole_bytes\":%llu,"
           "\"made_503\":%llu,\"made_stall\":%llu,\"made_reset\":%llu}\n",
           cpu_s, bytes_in, bytes_out, whole_bytes, made_503, made_stall, made_reset);
    fflush(stdout);
}

static char *whole_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(2);
    }
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *data = malloc(*size + 1);
    if (!data || fread(data, 1, *size, file) != *size) abort();
    fclose(file);
    return data;
}

// Read lines with key, size and path of the content (or "-"), separated by tabs.
static void read_objects(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) {
        perror(path);
        exit(2);
    }
    char key[2048], content[4096];
    unsigned long long size;
    while (fscanf(file, "%2047[^\t]\t%llu\t%4095[^\n]\n", key, &size, content) == 3) {
        size_t length = 0;
        note_object(key, size, strcmp(content, "-") ? whole_file(content, &length) : NULL);
    }
    fclose(file);
}

int main(int argc, char **argv) {
    const char *certificate = NULL, *key = NULL, *pattern_path = NULL;
    signal(SIGPIPE, SIG_IGN);
    make_crc32c_table();
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--cert")) certificate = value;
        else if (!strcmp(name, "--key")) key = value;
        else if (!strcmp(name, "--pattern")) pattern_path = value;
        else if (!strcmp(name, "--objects")) read_objects(value);
        else if (!strcmp(name, "--hashing")) is_hashing = atoi(value);
        else if (!strcmp(name, "--rate-bytes-s")) rate_bytes_s = atof(value);
        else if (!strcmp(name, "--link-bytes-s")) link_bytes_s = atof(value);
        else if (!strcmp(name, "--latency-s")) latency_s = atof(value);
        else if (!strcmp(name, "--tail-s-max")) tail_s_max = atof(value);
        else if (!strcmp(name, "--seed")) fault_clock = strtoull(value, NULL, 10) << 32;
        else if (!strcmp(name, "--share-503")) share_503 = atof(value);
        else if (!strcmp(name, "--share-stall")) share_stall = atof(value);
        else if (!strcmp(name, "--share-reset")) share_reset = atof(value);
        else {
            fprintf(stderr, "sink: what is %s?\n", name);
            return 2;
        }
    }
    pattern = calloc(1, PATTERN);
    if (pattern_path) {
        size_t size;
        free(pattern);
        pattern = (uint8_t *)whole_file(pattern_path, &size);
        if (size != PATTERN) return 2;
    }
    if (certificate) {
        tls = SSL_CTX_new(TLS_server_method());
        SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION);
        SSL_CTX_set_ciphersuites(tls, "TLS_AES_128_GCM_SHA256");
        SSL_CTX_set_num_tickets(tls, 0);
        SSL_CTX_set_keylog_callback(tls, take_secret);
        secrets_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, NULL);
        if (SSL_CTX_use_certificate_chain_file(tls, certificate) != 1 ||
            SSL_CTX_use_PrivateKey_file(tls, key, SSL_FILETYPE_PEM) != 1) {
            fprintf(stderr, "sink: no such certificate or key\n");
            return 2;
        }
    }
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1024)) {
        perror("sink");
        return 2;
    }
    getsockname(listener, (struct sockaddr *)&address, &length);
    pthread_t acceptor;
    pthread_create(&acceptor, NULL, accept_all, (void *)(intptr_t)listener);
    printf("{\"port\":%d}\n", ntohs(address.sin_port));
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) print_counters();
    print_counters();
    fflush(NULL);
    _exit(0);
}
