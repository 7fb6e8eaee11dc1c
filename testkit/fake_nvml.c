/* SPDX-License-Identifier: Apache-2.0
 *
 * A libnvidia-ml.so.1 without a GPU, for tests.  The file named by FAKE_NVML has lines "key value"; each call reads
 * it again.  Keys: count, init (error of nvmlInit), hang, crash, xid.seq, xid.gpu, xid.code, and for GPU 0 for
 * example 0.pci, 0.uuid, 0.name, 0.lost, 0.reset, 0.throttle, 0.uncorrected, 0.remaps, 0.pending, 0.failed,
 * 0.recovery.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, LOST = 15, RESET_REQUIRED = 16, UNKNOWN = 999 };
enum { GPUS = 64 };

typedef struct { int index; } Device;
static Device devices[GPUS];
static long seen_xid;

static int value(const char *key, char *into, size_t size)
{
	const char *path = getenv("FAKE_NVML");
	FILE *file = path ? fopen(path, "r") : NULL;
	char line[400];
	size_t length = strlen(key);
	int found = 0;
	if (!file)
		return 0;
	while (fgets(line, sizeof line, file)) {
		if (strncmp(line, key, length) || line[length] != ' ')
			continue;
		line[strcspn(line, "\n")] = 0;
		snprintf(into, size, "%s", line + length + 1);
		found = 1;
	}
	fclose(file);
	return found;
}

static long number(const char *key, long otherwise)
{
	char text[100];
	return value(key, text, sizeof text) ? strtol(text, NULL, 0) : otherwise;
}

static const char *key_of(Device *device, const char *name)
{
	static char key[60];
	snprintf(key, sizeof key, "%d.%s", device->index, name);
	return key;
}

static int health(Device *device)
{
	if (number(key_of(device, "lost"), 0))
		return LOST;
	return number(key_of(device, "reset"), 0) ? RESET_REQUIRED : OK;
}

static int text_of(Device *device, const char *name, const char *pattern, char *into, unsigned size)
{
	if (health(device))
		return health(device);
	if (!value(key_of(device, name), into, size))
		snprintf(into, size, pattern, device->index);
	return OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)number("init", OK); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "an error of the fake library"; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
	if (number("crash", 0))
		abort();
	while (number("hang", 0))
		usleep(10000);
	*count = (unsigned)number("count", 1);
	return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device)
{
	if (index >= GPUS)
		return UNKNOWN;
	devices[index].index = (int)index;
	*device = &devices[index];
	return health(*device);
}

typedef struct {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char address[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info)
{
	memset(info, 0, sizeof *info);
	return text_of(device, "pci", "00000000:%02X:00.0", info->address, sizeof info->address);
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size)
{
	return text_of(device, "uuid", "GPU-%08d", uuid, size);
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size)
{
	return text_of(device, "name", "Fake H100 %d", name, size);
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
	unsigned *failed)
{
	if (!number(key_of(device, "remaps"), 1))
		return NOT_SUPPORTED;
	*corrected = *uncorrected = 0;
	*pending = (unsigned)number(key_of(device, "pending"), 0);
	*failed = (unsigned)number(key_of(device, "failed"), 0);
	return health(device);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons)
{
	*reasons = (unsigned long long)number(key_of(device, "throttle"), 1);
	return health(device);
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, unsigned long long *count)
{
	(void)kind;
	(void)counter;
	*count = (unsigned long long)number(key_of(device, "uncorrected"), 0);
	return health(device);
}

typedef struct {
	unsigned field, scope;
	long long timestamp, latency;
	int type, result;
	union { double real; unsigned natural; unsigned long long large; } value;
} FieldValue;

int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values)
{
	for (int i = 0; i < count; i++) {
		values[i].result = OK;
		values[i].value.large = 0;
		values[i].value.natural = (unsigned)number(key_of(device, "recovery"), 0);
	}
	return health(device);
}

typedef struct {
	Device *device;
	unsigned long long type, data;
	unsigned gpu_instance, compute_instance;
} EventData;

int nvmlEventSetCreate(void **set) { *set = &seen_xid; seen_xid = number("xid.seq", 0); return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, void *set)
{
	(void)types;
	(void)set;
	return health(device);
}

int nvmlEventSetWait_v2(void *set, EventData *data, unsigned timeout_ms)
{
	(void)set;
	for (unsigned waited_ms = 0; waited_ms < timeout_ms; waited_ms += 20) {
		long seq = number("xid.seq", 0);
		if (seq > seen_xid) {
			seen_xid = seq;
			memset(data, 0, sizeof *data);
			data->device = &devices[number("xid.gpu", 0) % GPUS];
			data->type = 8;
			data->data = (unsigned long long)number("xid.code", 0);
			return OK;
		}
		usleep(20000);
	}
	return TIMEOUT;
}
