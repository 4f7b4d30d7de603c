/* cuFFT: a plan is a number, and keeps its stream. Transforms are noted and not computed. */
#include "mock.h"

enum { PLANS = 1 << 16, HALF = 2, HALF_COMPLEX = 6, DOUBLE = 1, DOUBLE_COMPLEX = 5 };
static void *streams[PLANS];
static int plans;

API int cufftCreate(int *plan) { *plan = __atomic_fetch_add(&plans, 1, __ATOMIC_RELAXED) % PLANS; streams[*plan] = NULL; return SUCCESS; }
API int cufftDestroy(int plan) { return SUCCESS; }
API int cufftSetAutoAllocation(int plan, int on) { return SUCCESS; }
API int cufftSetWorkArea(int plan, void *area) { return SUCCESS; }
API int cufftSetStream(int plan, void *stream) { streams[plan] = stream; return SUCCESS; }
/* Its memory, which torch allocates, is one complex number for each element: the least of what cuFFT's manual tells, from 1 to 8.
 * No GPU was asked. */
API int cufftXtMakePlanMany(int plan, int rank, const long long *n, const long long *inembed, long long istride, long long idist, int input,
                            const long long *onembed, long long ostride, long long odist, int output, long long batch, size_t *bytes,
                            int execution) {
    *bytes = (size_t)batch * (execution == HALF || execution == HALF_COMPLEX ? 4 : execution == DOUBLE || execution == DOUBLE_COMPLEX ? 16 : 8);
    for (int axis = 0; axis < rank; axis++) *bytes *= (size_t)n[axis];
    return SUCCESS;
}
API int cufftXtExec(int plan, void *input, void *output, int direction) { note("kernel", streams[plan], "cufft", 0, 0, 0, 0); return SUCCESS; }
