/* NVRTC, a library of its own (build.py), which torch opens by its name: kernels that are compiled at run time are only named. */
#include "mock.h"
#include <stdlib.h>
#include <string.h>

typedef struct { char *names[64]; int count; } Program;

API int nvrtcVersion(int *major, int *minor) {
    const char *version = getenv("GPTSCALE_MOCK_VERSION");
    int number = version ? atoi(version) : 13000;
    *major = number / 1000, *minor = number % 1000 / 10;
    return SUCCESS;
}
API int nvrtcCreateProgram(Program **p, const char *source, const char *name, int headers, const char **texts, const char **names) {
    *p = calloc(1, sizeof **p);
    return SUCCESS;
}
API int nvrtcDestroyProgram(Program **p) { *p = NULL; return SUCCESS; }
API int nvrtcAddNameExpression(Program *p, const char *name) {
    if (p->count < 64) p->names[p->count++] = strdup(name);
    return SUCCESS;
}
API int nvrtcCompileProgram(Program *p, int count, const char **options) { return SUCCESS; }
API int nvrtcGetLoweredName(Program *p, const char *name, const char **lowered) {
    for (int i = 0; i < p->count; i++)
        if (!strcmp(p->names[i], name)) *lowered = p->names[i];
    return SUCCESS;
}
#define EMPTY(name) \
    API int nvrtcGet##name##Size(Program *p, size_t *bytes) { *bytes = 1; return SUCCESS; } \
    API int nvrtcGet##name(Program *p, char *text) { *text = 0; return SUCCESS; }
EMPTY(PTX) EMPTY(CUBIN) EMPTY(ProgramLog)
API const char *nvrtcGetErrorString(int error) { return error ? "an error of the mock of NVRTC" : "no error"; }
