def check_until_stable(x): return None
def stopping_points(n): return ()
